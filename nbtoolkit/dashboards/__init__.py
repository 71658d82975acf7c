"""optuna-dashboard and the MLflow UI on loopback, and how a browser reaches them."""
