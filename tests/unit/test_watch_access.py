"""Who may see the page of a run: names, tokens and orders, without a server."""

import socket
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette")
from starlette.requests import HTTPConnection

from maniple.cli.control import watch
from maniple.errors import InvalidArgument
from maniple.launch.services import listen
from maniple.watch.access import Access
from maniple.wire.address import Address

TOKEN = "the token"


def refusal(access: Access, method: str = "GET", query: str = "", **headers: str) -> str:
    given = {"host": "127.0.0.1:80", **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    return access.refusal(HTTPConnection({"type": "http", "headers": raw, "query_string": query.encode()}), method)


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def access(request) -> Access:
    with socket.create_server((request.param, 0)) as door:
        return Access.of(door, TOKEN)


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "LOCALHOST:9", "127.0.0.1:8080", "[::1]:8080", "[::1]"])
def test_names_that_every_machine_has_for_itself_are_served(access, host):
    assert refusal(access, query="token=the+token", host=host) == ""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "::1.evil"])
def test_names_of_others_are_not(access, host):
    assert "under that name" in refusal(access, query="token=the+token", host=host)


def test_a_page_for_other_machines_is_served_under_its_address_too(access):
    said = refusal(access, query="token=the+token", host="10.1.2.3:8080")
    assert ("under that name" in said) == (not access.is_open)


@pytest.mark.parametrize("query", ["", "token=", "token=the", "token=the+token+", "token=%C3%BC", "x=the+token"])
def test_a_wrong_token_is_refused_and_the_words_say_what_to_do(access, query):
    assert "maniple watch RUN --web" in refusal(access, query=query)


def test_the_token_may_come_in_the_address_a_cookie_or_a_header(access):
    assert refusal(access, query="token=the+token") == ""
    assert refusal(access, cookie=f'{access.cookie}="{TOKEN}"') == ""
    assert refusal(access, authorization=f"Bearer {TOKEN}") == ""
    assert refusal(access, authorization=f"Basic {TOKEN}") != ""
    assert refusal(access, cookie=f'maniple-1="{TOKEN}"') != "", "that of another page"


def test_orders_need_the_header_of_the_page_and_its_origin(access):
    known = {"authorization": f"Bearer {TOKEN}"}
    own = "http://127.0.0.1:80"
    assert refusal(access, "POST", **known, x_maniple="1", origin=own) == ""
    for headers in (
        {},
        {"origin": own},
        {"x_maniple": "1", "origin": "http://evil.example"},
        {"x_maniple": "1", "origin": "null"},
    ):
        assert "from the page itself" in refusal(access, "POST", **known, **headers)
    assert "token" in refusal(access, "POST", x_maniple="1", origin=own)


def test_a_token_is_new_each_time_and_not_shown(access):
    with socket.create_server(("127.0.0.1", 0)) as door:
        one, other = Access.of(door), Access.of(door)
    assert one.token != other.token and len(one.token) >= 32
    assert one.token not in repr(one)


def test_what_a_page_needs_is_reported_before_a_run_begins(monkeypatch):
    monkeypatch.setattr("maniple.launch.services._PAGE_PACKAGES", ("starlette", "no_such_package"))
    with pytest.raises(InvalidArgument, match=r"--web needs no_such_package.*pip install 'maniple\[watch\]'"):
        listen(Address())


def test_a_page_of_a_run_without_its_extra_is_refused_with_the_extra_to_install(monkeypatch, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr("maniple.launch.services._PAGE_PACKAGES", ("no_such_package",))
    monkeypatch.setitem(sys.modules, "maniple.watch.access", None)  # it needs the package
    monkeypatch.delattr("maniple.watch.access", raising=False)
    done = CliRunner().invoke(watch, ["--web", str(tmp_path)])
    assert isinstance(done.exception, InvalidArgument), done.exception
    assert "pip install 'maniple[watch]'" in str(done.exception) and not done.output


def test_an_address_that_is_taken_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as door:
        taken = Address("127.0.0.1", door.getsockname()[1])
        with pytest.raises(InvalidArgument, match=r"in use.*port 0"):
            listen(taken)
