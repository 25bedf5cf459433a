"""Runs the Python kernel of the code interpreter with matplotlib, pandas and IPython, and reads what it sends with E2B's
official client. Arguments: the Python that has them, and the two files of the kernel."""

import json
import subprocess
import sys
import tempfile

from e2b_code_interpreter.charts import _deserialize_chart

python, *files = sys.argv[1:]
whole = tempfile.NamedTemporaryFile("w", suffix=".py")
whole.write("\n".join(open(file).read() for file in files))
whole.flush()
kernel = subprocess.Popen([python, whole.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def until(id):
    messages = []
    for line in kernel.stdout:
        message = json.loads(line)
        if message == {"type": "end", "id": id}:
            return messages
        messages.append(message)
    raise AssertionError(f"the kernel ended: {messages}")


def run(code):
    request = {"id": "7", "code": code, "env": {}, "message_bytes_max": 1 << 20}
    kernel.stdin.write(json.dumps(request).encode() + b"\n")
    kernel.stdin.flush()
    messages = until("7")
    assert all(message["type"] == "result" for message in messages), messages
    return [message["data"] for message in messages]


def chart(code):
    (data,) = run(f"import matplotlib.pyplot as plt\n{code}\nplt.show()")
    assert data["image/png"].startswith("iVBOR"), "a PNG"
    return _deserialize_chart(json.loads(data["e2b/chart"]))


until("ready")
line = chart("plt.plot([1, 2, 3], [4, 5, 6], label='a'); plt.xlabel('Time (s)'); plt.title('T')")
assert (line.type.value, line.title, line.x_label, line.x_unit) == ("line", "T", "Time (s)", "s"), line
assert (line.elements[0].label, [list(point) for point in line.elements[0].points]) == ("a", [[1, 4], [2, 5], [3, 6]])
assert (line.x_scale.value, line.y_scale.value) == ("linear", "linear")
dated = chart("import datetime\nplt.plot([datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)], [1, 2]); plt.yscale('log')")
assert (dated.x_scale.value, dated.y_scale.value, dated.elements[0].points[0][0]) == ("datetime", "log", "2024-01-01")
named = chart("plt.plot(['u', 'v'], [1, 2])")
assert (named.x_scale.value, named.elements[0].points[1][0]) == ("categorical", "v"), named
scatter = chart("plt.scatter([1, 2], [3, 4], label='s')")
assert (scatter.type.value, list(scatter.elements[0].points[1])) == ("scatter", [2, 4]), scatter
bars = chart("plt.bar(['x', 'y'], [3, 4], label='g'); plt.bar(['x', 'y'], [1, 2], label='h')")
assert [(bar.label, bar.group, bar.value) for bar in bars.elements] == [("x", "g", 3), ("y", "g", 4), ("x", "h", 1), ("y", "h", 2)]
pie = chart("plt.pie([1, 3], labels=['p', 'q'])")
assert [(part.label, part.angle, part.radius) for part in pie.elements] == [("p", 90, 1), ("q", 270, 1)], pie
for style in ["", ", patch_artist=True"]:
    boxes = chart(f"plt.boxplot([[1, 2, 3, 4, 20], [2, 3, 4]]{style})")
    box = boxes.elements[0]
    found = (box.label, box.min, box.first_quartile, box.median, box.third_quartile, box.max, box.outliers)
    assert (boxes.type.value, *found) == ("box_and_whisker", "1", 1, 2, 3, 4, 4, [20]), found
two = chart("_, (a, b) = plt.subplots(1, 2); a.plot([1, 2]); b.bar([1, 2], [1, 2]); plt.suptitle('two')")
assert (two.type.value, two.title, [one.type.value for one in two.elements]) == ("superchart", "two", ["line", "bar"])
assert chart("plt.imshow([[1, 2], [3, 4]])").type.value == "unknown"

(table,) = run("import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', 'y']})")
assert json.loads(table["e2b/data"]) == {"a": [1, 2], "b": ["x", "y"]} and "<table" in table["text/html"]
main, figure = run("plt.plot([1, 2])")
assert "Line2D" in main["text/plain"] and "image/png" in figure, "figures are shown at the end of a cell"
assert "image/png" in run("figure, axes = plt.subplots()\nfigure")[0]
assert run("1") == [{"text/plain": "1"}], "and closed"
shown, last = run("from IPython.display import display, HTML, Markdown\ndisplay(HTML('<i>'))\nMarkdown('# x')")
assert (shown["text/html"], last["text/markdown"]) == ("<i>", "# x")
print("every chart was read")
kernel.stdin.close()
assert kernel.wait(30) == 0
