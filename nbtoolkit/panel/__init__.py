"""The control panel of a notebook (``nb.panel``)."""
