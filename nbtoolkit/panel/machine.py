"""Machine: what is here and what a launch would do, in words."""

from __future__ import annotations

from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.panel.draft import Checked
from nbtoolkit.runtime.hardware import detect_hardware
from nbtoolkit.runtime.host import detect_host
from nbtoolkit.runtime.plan import make_plan


def plan_text(checked: Checked) -> str:
    """Host, devices and plan; where it is refused, the reason.

    Args:
        checked: of the form.
    """
    host, hardware = detect_host(), detect_hardware()
    lines = [f"host: {host.kind}", f"devices: {hardware.explain()}"]
    if checked.config is None:
        names = ", ".join(checked.errors)
        which = f": {names}" if names else ""
        return "\n".join([*lines, f"plan: something in the settings is wrong{which}"])
    try:
        plan = make_plan(checked.config, host, hardware).explain().splitlines()[0]
    except NbtoolkitError as error:
        plan = f"refused: {error}"
    return "\n".join([*lines, plan])
