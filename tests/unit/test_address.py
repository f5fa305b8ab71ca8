"""Addresses of hosts as a person writes them, and the file by which a host says where it is."""

import os
import socket

import msgspec
import pytest

from maniple.errors import InvalidArgument
from maniple.wire.address import Address, HostFile


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.7:29400", "10.0.0.7", 29400), ("node-07:0", "node-07", 0), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_is_written_as_it_was_read(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port, address.path) == (host, port, None)
    assert str(address) == text


def test_a_unix_socket_is_a_path_that_may_hold_colons():
    address = Address.parse("unix:/run/a:b")
    assert (address.path, str(address)) == ("/run/a:b", "unix:/run/a:b")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("node-07", "node-07:29400"), ("node-07:1", "node-07:1"), ("::1", "[::1]:29400"), ("[::1]:1", "[::1]:1")],
)
def test_a_default_port_is_used_where_none_is_written(text, parsed):
    assert str(Address.parse(text, default_port=29400)) == parsed


@pytest.mark.parametrize("text", ["node-07", "node-07:", ":29400", "node-07:http", "node-07:65536", "node-07:-1", ""])
def test_what_is_no_address_is_refused_with_an_example(text):
    with pytest.raises(InvalidArgument, match=r"is not an address\. Write HOST:PORT .* 10\.0\.0\.7:29400"):
        Address.parse(text)


def test_a_port_alone_is_refused_with_both_addresses_it_may_mean():
    with pytest.raises(InvalidArgument, match=r"Write 127\.0\.0\.1:29400 .* or 0\.0\.0\.0:29400"):
        Address.parse("29400", default_port=1)


@pytest.mark.parametrize(("text", "is_wildcard"), [("0.0.0.0:1", True), ("[::]:1", True), ("127.0.0.1:1", False)])
def test_an_address_of_all_interfaces_is_no_address_for_other_machines(text, is_wildcard):
    assert Address.parse(text).is_wildcard is is_wildcard


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_listener_is_reached_at_its_address(kind, tmp_path):
    address = Address(path=str(tmp_path / "socket")) if kind == "unix" else Address()
    with address.listen() as listener:
        if kind == "tcp":
            address = Address(port=listener.getsockname()[1])
        with address.connect(5.0) as near, listener.accept()[0] as far:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
    with pytest.raises(OSError, match="refused"):
        address.connect(5.0)


def host_file(**values) -> HostFile:
    about = {"host": "0.0.0.0", "port": 1, "address": "node-07:1", "unix": None, "certificate": None, "key": None}
    return HostFile(**about | {"lineage": "0" * 16, "node": os.uname().nodename, "pid": 1} | values)


def test_a_host_on_this_machine_is_reached_by_its_unix_socket_while_that_exists(tmp_path):
    path = tmp_path / "socket"
    host = host_file(unix=f"unix:{path}")
    assert str(host.nearest) == "node-07:1"
    with Address(path=str(path)).listen():
        assert str(host.nearest) == f"unix:{path}" and host.answers(5.0)
        assert str(host_file(unix=f"unix:{path}", node="elsewhere").nearest) == "node-07:1"
    assert not host.answers(5.0), "nobody listens at the socket any more"


def test_a_host_file_is_read_back_and_nothing_else_is_taken_for_one(tmp_path):
    path, link = tmp_path / "host.json", tmp_path / "link"
    assert HostFile.read(path) is None
    for damaged in (b"", b"[]", b'{"host": 1}', b"\xff"):
        path.write_bytes(damaged)
        assert HostFile.read(path) is None
    path.write_bytes(msgspec.json.encode(host_file(port=7)))
    assert HostFile.read(path) == host_file(port=7)
    link.symlink_to(path)
    assert HostFile.read(link) is None, "a link may lead to a file of somebody else"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert HostFile.read(tmp_path / "socket") is None
