"""The name by which users import the integrations, which are an extra.

This module stands for the package of the extra: ``from nbtoolkit.integrations import lightning``
imports the package's module.
"""

import sys

from nbtoolkit.environment.installed import import_extra

sys.modules[__name__] = import_extra("integrations")
