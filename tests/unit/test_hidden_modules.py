"""Files of a folder that hide modules of the standard library."""

from rallypoint.launch.server.hidden_modules import hidden


def test_modules_and_packages_that_python_would_take_are_found(tmp_path):
    for name in ("random.py", "train.py", "queue.pyc", "json.txt", "calendar.cpython-311.so"):
        (tmp_path / name).touch()
    (tmp_path / "types").mkdir()
    (tmp_path / "types" / "__init__.py").touch()
    (tmp_path / "logging").mkdir()  # a folder of logs: Python prefers its own module
    assert hidden(str(tmp_path)) == ["queue.pyc", "random.py", "types"]


def test_a_link_that_leads_in_a_circle_hides_nothing(tmp_path):
    (tmp_path / "queue").symlink_to("queue")
    (tmp_path / "random.py").touch()
    assert hidden(str(tmp_path)) == ["random.py"]


def test_a_path_that_is_no_folder_hides_nothing(tmp_path):
    (tmp_path / "train.zip").touch()
    assert hidden(None) == hidden(str(tmp_path / "train.zip")) == hidden(str(tmp_path / "no")) == []
