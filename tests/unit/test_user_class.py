"""FILE.py:CLASS and NAME=VALUE of the command line: a user's class and its arguments."""

import sys

import pytest

from maniple.errors import InvalidArgument
from maniple.user_class import load_file, parse_arguments, parse_class


def test_a_class_is_named_by_its_file(tmp_path):
    (tmp_path / "a:b.py").touch()
    assert parse_class(f"{tmp_path}/a:b.py:Early") == (tmp_path / "a:b.py", "Early")


@pytest.mark.parametrize("spec", ["Early", "a.py", "a.py:", "a.txt:Early", "a.py:1x", "a.py:x.y"])
def test_what_names_no_class_is_refused_with_the_option_and_an_example(spec):
    with pytest.raises(
        InvalidArgument, match=r"--model .* names no class\. Write FILE\.py:CLASS, .*models/net\.py:Net"
    ):
        parse_class(spec, "--model")


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"there is no file 'net.py' in {tmp_path}"):
        parse_class("net.py:Net")


def test_arguments_are_json_where_they_can_be_and_text_elsewhere():
    given = ["lr=0.1", "n=3", "is=true", "no=null", "sizes=[1,2]", "name=3a", "path=a=b", "empty="]
    assert parse_arguments(given) == {
        "lr": 0.1, "n": 3, "is": True, "no": None, "sizes": [1, 2], "name": "3a", "path": "a=b", "empty": "",
    }  # fmt: skip


@pytest.mark.parametrize("arg", ["lr", "=1", "a b=1", "1a=1"])
def test_what_is_no_argument_is_refused_with_an_example(arg):
    with pytest.raises(InvalidArgument, match=r"--model-arg .* is no argument\. Write NAME=VALUE, e\.g\. lr=0\.1"):
        parse_arguments([arg], "--model-arg")


def test_a_file_is_imported_with_its_folder_as_a_script_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "beside_the_class.py").write_text("VALUE = 7")
    (tmp_path / "a_users_class.py").write_text("from beside_the_class import VALUE\nclass Net: value = VALUE")
    module = load_file(tmp_path / "a_users_class.py")
    try:
        assert module.Net.value == 7
        assert sys.modules["a_users_class"] is module, "so that its objects can be pickled"
    finally:
        for name in ("beside_the_class", "a_users_class"):
            del sys.modules[name]
