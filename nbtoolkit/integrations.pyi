from nbtoolkit.extras.integrations import boosting as boosting
from nbtoolkit.extras.integrations import keras as keras
from nbtoolkit.extras.integrations import lightning as lightning
from nbtoolkit.extras.integrations import sklearn as sklearn
from nbtoolkit.extras.integrations import transformers as transformers
