"""Prepare notebooks and wheels for Kaggle and Colab."""
