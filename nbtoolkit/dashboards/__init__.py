"""Dashboards of others (Optuna's, MLflow's) on loopback, and how a browser reaches them."""
