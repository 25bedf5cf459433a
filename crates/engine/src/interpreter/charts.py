# Data of matplotlib's figures, in the form that E2B's clients read: line, scatter, bar, pie and box plots.


def _number(value):
    """A number that JSON has, or a text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return value if value == value and abs(value) != float("inf") else None


def _unit(label):
    """`Time (s)` has the unit `s`."""
    start, end = label.rfind("("), label.rfind(")")
    return label[start + 1 : end] if 0 <= start < end else None


def _axis(axes, name):
    """Values of an axis of points: dates as texts."""
    from matplotlib import category, dates

    axis = getattr(axes, f"{name}axis")
    if isinstance(axis.get_converter() if hasattr(axis, "get_converter") else axis.converter, category.StrCategoryConverter):
        texts = {number: text for text, number in axis.units._mapping.items()}
        return "categorical", lambda value: texts.get(_number(value), _number(value))
    if isinstance(axis.get_major_locator(), dates.DateLocator) or isinstance(
        axis.get_major_formatter(), (dates.AutoDateFormatter, dates.DateFormatter, dates.ConciseDateFormatter)
    ):

        def date(value):
            import datetime

            if isinstance(value, (datetime.date, datetime.datetime)):
                return value.isoformat()
            return dates.num2date(value).isoformat() if isinstance(_number(value), (int, float)) else str(value)

        return "datetime", date
    return getattr(axes, f"get_{name}scale")(), _number


def _plane(axes, kind, elements):
    x, y = axes.get_xlabel(), axes.get_ylabel()
    return {
        "type": kind,
        "title": axes.get_title() or None,
        "x_label": x or None,
        "y_label": y or None,
        "x_unit": _unit(x),
        "y_unit": _unit(y),
        "elements": elements,
    }


def _points(axes, kind, series):
    x_scale, x_value = _axis(axes, "x")
    y_scale, y_value = _axis(axes, "y")
    elements = []
    for label, points in series:
        values = [[x_value(x), y_value(y)] for x, y in points]
        elements.append({"label": label, "points": values})
    chart = _plane(axes, kind, elements)
    for name, scale, value in [("x", x_scale, x_value), ("y", y_scale, y_value)]:
        chart[f"{name}_ticks"] = [value(tick) for tick in getattr(axes, f"get_{name}ticks")()]
        chart[f"{name}_tick_labels"] = [text.get_text() for text in getattr(axes, f"get_{name}ticklabels")()]
        chart[f"{name}_scale"] = scale
    return chart


def _pie(axes):
    from matplotlib.patches import Wedge

    wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
    if not wedges:
        return None
    elements = []
    for index, wedge in enumerate(wedges):
        label = wedge.get_label() or f"Element {index}"
        angle = abs(_number(wedge.theta2) - _number(wedge.theta1))
        elements.append({"label": label, "angle": angle, "radius": _number(wedge.r)})
    return {"type": "pie", "title": axes.get_title() or None, "elements": elements}


def _boxes(axes):
    """A box plot: a box is a line or a patch of five or more corners, with whiskers at its ends."""
    from matplotlib.patches import PathPatch

    lines = axes.get_lines()
    boxes = [patch.get_path().vertices for patch in axes.patches if isinstance(patch, PathPatch)]
    closed = [line for line in lines if len(line.get_xdata()) == 5]
    boxes = boxes or [list(zip(line.get_xdata(), line.get_ydata())) for line in closed]
    plain = [line for line in lines if not any(line is other for other in closed)]
    if not boxes or len(plain) < 5 * len(boxes):
        return None
    elements = []
    labels = [text.get_text() for text in axes.get_xticklabels()]
    for index, box in enumerate(boxes):
        xs = [float(point[0]) for point in box]
        ys = [float(point[1]) for point in box]
        middle, low, high = (min(xs) + max(xs)) / 2, min(ys), max(ys)
        least, most, median, outliers = low, high, None, []
        for line in plain:
            x = [float(value) for value in line.get_xdata()]
            y = [float(value) for value in line.get_ydata()]
            if not x:
                continue
            if line.get_linestyle() == "None":
                if all(abs(value - middle) < 1e-9 for value in x):
                    outliers.extend(y)
            elif len(x) == 2 and x[0] == x[1] == middle:
                least, most = min(least, *y), max(most, *y)
            elif len(x) == 2 and y[0] == y[1] and min(xs) <= min(x) and max(x) <= max(xs):
                # Caps are horizontal as well, but at the ends of the whiskers.
                if low <= y[0] <= high and (median is None or max(x) - min(x) >= max(xs) - min(xs) - 1e-9):
                    median = y[0]
        elements.append(
            {
                "label": labels[index] if index < len(labels) else str(index + 1),
                "min": least,
                "first_quartile": low,
                "median": median,
                "third_quartile": high,
                "max": most,
                "outliers": outliers,
            }
        )
    return _plane(axes, "box_and_whisker", elements)


def _bars(axes):
    from matplotlib.container import BarContainer

    containers = [container for container in axes.containers if isinstance(container, BarContainer)]
    if not containers:
        return None
    elements = []
    for container in containers:
        upright = getattr(container, "orientation", None) != "horizontal"
        names = _ticks(axes, "x" if upright else "y")
        group = container.get_label()
        for patch in container.patches:
            center = (patch.get_x() + patch.get_width() / 2) if upright else (patch.get_y() + patch.get_height() / 2)
            label = names.get(round(float(center), 6), _number(center))
            value = patch.get_height() if upright else patch.get_width()
            elements.append({"label": str(label), "group": group, "value": _number(value)})
    return _plane(axes, "bar", elements)


def _ticks(axes, name):
    ticks = getattr(axes, f"get_{name}ticks")()
    texts = getattr(axes, f"get_{name}ticklabels")()
    return {round(float(tick), 6): text.get_text() for tick, text in zip(ticks, texts) if text.get_text()}


def _chart(axes):
    for make in (_pie, _boxes, _bars):
        chart = make(axes)
        if chart is not None:
            return chart
    shown = [line for line in axes.get_lines() if len(line.get_xdata())]
    if shown:
        return _points(axes, "line", [(line.get_label(), list(zip(line.get_xdata(), line.get_ydata()))) for line in shown])
    from matplotlib.collections import PathCollection

    clouds = [cloud for cloud in axes.collections if isinstance(cloud, PathCollection)]
    if clouds:
        return _points(axes, "scatter", [(cloud.get_label(), [tuple(point) for point in cloud.get_offsets()]) for cloud in clouds])
    return {"type": "unknown", "title": axes.get_title() or None, "elements": []}


def figure_chart(figure):
    """The chart of a figure; several axes make one of charts."""
    axes = [one for one in figure.axes if one.get_visible() and not hasattr(one, "_colorbar")]
    charts = [_chart(one) for one in axes]
    if not charts:
        return None
    if len(charts) == 1:
        return charts[0]
    title = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    return {"type": "superchart", "title": title or None, "elements": charts}
