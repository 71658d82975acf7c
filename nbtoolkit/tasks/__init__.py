"""Ready-made train functions on data that ships with scikit-learn."""
