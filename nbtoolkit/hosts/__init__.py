"""The way to other hosts: a notebook for Kaggle's client, wheels for where no internet is."""
