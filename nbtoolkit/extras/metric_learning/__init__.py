"""Train an encoder of images and a classifier on it, and use the encoder.

Importing this package imports no torch.
"""

from __future__ import annotations

from nbtoolkit.extras.metric_learning.images import load_images as load_images
from nbtoolkit.extras.metric_learning.trained_encoder import embed as embed
from nbtoolkit.extras.metric_learning.trained_encoder import load_encoder as load_encoder
from nbtoolkit.extras.metric_learning.trained_encoder import nearest as nearest
from nbtoolkit.extras.metric_learning.trained_encoder import save_index as save_index
from nbtoolkit.extras.metric_learning.two_stages import train as train
