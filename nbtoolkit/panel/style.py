"""Style: what the stock widgets lack in contrast, beside a panel's widgets and for them alone."""

from __future__ import annotations

CLASS = "nbtoolkit-panel"
"""Of the panel's outermost widget."""

# A grey whose contrast is above 3 on white (4.5) and on the dark theme's ground (4.2).
_GREY = "#767676"

_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath d='M5 7l4 4 4-4' fill='none' stroke='%23808080' stroke-width='2'/%3E%3C/svg%3E"
)

# What the stock has (contrasts by WCAG 2.2): labels of tabs 4.2 to 4.5 where SC 1.4.3 wants 4.5,
# placeholders 3.5, borders of fields 1.9 where SC 1.4.11 wants 3, black arrows on dark lists, and
# hardly a sign of where the keyboard's focus is. In a narrow window there is no room
# for tabs of one width in one row.
STYLE = f"""<style>
.jupyter-widgets.{CLASS} {{
  --jp-widgets-input-border-color: {_GREY};
  --jp-widgets-input-focus-border-color: var(--jp-brand-color1, {_GREY});
}}
.jupyter-widgets.{CLASS} ::placeholder {{
  color: var(--jp-ui-font-color2, {_GREY});
}}
.jupyter-widgets.{CLASS} .widget-tab > .lm-TabBar .lm-TabBar-tab {{
  color: var(--jp-ui-font-color1, inherit);
  flex: 1 0 auto;
}}
.jupyter-widgets.{CLASS} .widget-tab > .lm-TabBar > .lm-TabBar-content {{
  flex-wrap: wrap;
}}
.jupyter-widgets.{CLASS} .widget-dropdown > select {{
  background-image: url("{_ARROW}");
}}
.jupyter-widgets.{CLASS} :is(button, input, select, textarea, .lm-TabBar-tab):focus-visible {{
  outline: 2px solid var(--jp-brand-color1, {_GREY}) !important;
  outline-offset: 1px;
}}
</style>"""
