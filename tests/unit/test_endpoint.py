"""Endpoints: every form that is allowed and what it means; every mistake and its message."""

import contextlib
import pickle
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.rendezvous import Endpoint, HostPort, parse_endpoint


def at(*hosts: tuple[str, int], scheme: str = "tcp", backend: str = "", **more: Any) -> Endpoint:
    backend = backend or {"tcp": "tcpstore", "etcds": "etcd"}.get(scheme, scheme)
    each = tuple(HostPort(host, port) for host, port in hosts)
    return Endpoint(scheme=scheme, backend=backend, hosts=each, **more)


GOOD: list[tuple[str, str | None, Endpoint]] = [
    # tcp
    ("tcp://node0:29500", None, at(("node0", 29500))),
    ("tcp://node0", None, at(("node0", 29400))),
    ("tcp://node0/", None, at(("node0", 29400))),
    ("TCP://Node0:1", None, at(("Node0", 1))),
    ("  tcp://node0:1\n", None, at(("node0", 1))),
    ("tcp://a:1,b:2", None, at(("a", 1), ("b", 2))),
    ("tcp://a,b:2", "c10d", at(("a", 29400), ("b", 2))),
    ("tcp://[::1]:29400", None, at(("::1", 29400))),
    ("tcp://[::1]", None, at(("::1", 29400))),
    ("tcp://[fe80::1%25eth0]:5", None, at(("fe80::1%eth0", 5))),
    ("[fe80::1%eth0]:5", None, at(("fe80::1%eth0", 5))),
    ("[fe80::1%25]:5", None, at(("fe80::1%25", 5))),
    ("tcp://[fe80::1%2525]:5", None, at(("fe80::1%25", 5))),
    ("[fe80::1%251]:5", None, at(("fe80::1%251", 5))),
    ("tcp://[fe80::1%25251]:5", None, at(("fe80::1%251", 5))),
    ("tcp://10.0.0.7:0", None, at(("10.0.0.7", 0))),
    ("tcp://node0:65535", None, at(("node0", 65535))),
    ("tcp://node-0.pool_a.example.com.", None, at(("node-0.pool_a.example.com.", 29400))),
    ("tcp://bücher:1", None, at(("bücher", 1))),
    ("tcp://n?a=1&b=x%26y%3D", None, at(("n", 29400), options={"a": "1", "b": "x&y="})),
    # without a scheme
    ("node0", None, at(("node0", 29400))),
    ("node0:1", None, at(("node0", 1))),
    ("node0:1", "tcpstore", at(("node0", 1))),
    ("node0:1", "tcp", at(("node0", 1))),
    ("node0:1", "c10d", at(("node0", 1))),
    ("node0:1", "static", at(("node0", 1), backend="static")),
    ("tcp://node0:1", "static", at(("node0", 1), backend="static")),
    ("[::1]:9", None, at(("::1", 9))),
    ("a:1,b", "c10d", at(("a", 1), ("b", 29400))),
    ("etcd:2379", "etcd", at(("etcd", 2379), scheme="etcd")),  # a container's name
    # etcd
    ("etcd://a", None, at(("a", 2379), scheme="etcd")),
    ("etcd://a:1,[::2]", "etcd", at(("a", 1), ("::2", 2379), scheme="etcd")),
    ("a,b:1", "etcd-v2", at(("a", 2379), ("b", 1), scheme="etcd")),
    ("etcds://a", "etcd", at(("a", 2379), scheme="etcds")),
    ("etcd://u@a", None, at(("a", 2379), scheme="etcd", user="u")),
    ("etcd://user:pa%40ss@a", None, at(("a", 2379), scheme="etcd", user="user", password="pa@ss")),
    ("u:p:q@a", "etcd", at(("a", 2379), scheme="etcd", user="u", password="p:q")),
    (
        "etcds://a?ca=/etc/ca.pem&cert=c&key=k",
        None,
        at(("a", 2379), scheme="etcds", options={"ca": "/etc/ca.pem", "cert": "c", "key": "k"}),
    ),
    # file and memory
    ("file:///shared/x", None, at(scheme="file", path="/shared/x")),
    ("file:///a%20b%3Fc@d?mode=x", None, at(scheme="file", path="/a b?c@d", options={"mode": "x"})),
    ("file:////x", None, at(scheme="file", path="//x")),
    ("file:///%FF", None, at(scheme="file", path="/\udcff")),
    ("/shared/x y?#%", "file", at(scheme="file", path="/shared/x y?#%")),
    ("memory://name", None, at(scheme="memory", path="name")),
    ("name", "memory", at(scheme="memory", path="name")),
]


@pytest.mark.parametrize(("text", "backend", "expected"), GOOD)
def test_every_allowed_form(text: str, backend: str | None, expected: Endpoint) -> None:
    assert parse_endpoint(text, backend=backend) == expected


@pytest.mark.parametrize(("text", "backend", "expected"), GOOD)
def test_the_url_of_every_form_means_the_same(
    text: str, backend: str | None, expected: Endpoint
) -> None:
    again = parse_endpoint(str(expected), backend=expected.backend)
    assert again.hosts == expected.hosts and again.options == expected.options
    assert again.password is None
    if expected.password is None:
        assert again == expected


def test_a_default_port_is_for_hosts_without_one() -> None:
    endpoint = parse_endpoint("a,b:5", default_port=29500)
    assert endpoint.hosts == (HostPort("a", 29500), HostPort("b", 5))


# Text, backend, what the error says, what its example is.
BAD: list[tuple[str, str | None, str, str]] = [
    ("", None, "empty", "tcp://node0:29400"),
    ("  ", "etcd", "empty", "etcd://node0:2379"),
    ("", "memory", "empty", "memory://name"),
    ("tcp://", None, "a host is empty", "tcp://node0:29400"),
    ("tcp://:29400", None, "a host is empty", "tcp://node0:29400"),
    ("tcp://a,,b", None, "a host is empty", "tcp://node0:29400"),
    ("a,", None, "a host is empty", "tcp://node0:29400"),
    ("node0:", None, "from 0 to 65535 after the colon, not ''", "tcp://node0:29400"),
    ("node0:http", None, "from 0 to 65535 after the colon, not 'http'", "tcp://node0:29400"),
    ("node0:65536", None, "not '65536'", "tcp://node0:29400"),
    ("node0:-1", None, "not '-1'", "tcp://node0:29400"),
    ("node0:+1", None, "not '+1'", "tcp://node0:29400"),
    ("node0:٣", None, "not '٣'", "tcp://node0:29400"),
    ("node0:1_0", None, "not '1_0'", "tcp://node0:29400"),
    ("etcd://node0:0", None, "from 1 to 65535", "etcd://node0:2379"),
    ("29400", None, "a port without a host", "tcp://node0:29400"),
    ("node 0:29400", None, "blank", "tcp://node0:29400"),
    ("tcp://a, b", None, "blank", "tcp://node0:29400"),
    ("node\x000", None, "control character", "tcp://node0:29400"),
    ("-node", None, "not a host name", "tcp://node0:29400"),
    ("a..b", None, "not a host name", "tcp://node0:29400"),
    ("a" * 64, None, "not a host name", "tcp://node0:29400"),
    (".".join(["abc"] * 80), None, "not a host name", "tcp://node0:29400"),
    ("a*b", None, "not a host name", "tcp://node0:29400"),
    ("10.0.0.300", None, "not an IPv4 address", "tcp://node0:29400"),
    ("10.0.1:5", None, "not an IPv4 address", "tcp://node0:29400"),
    ("fe80::1", None, "needs brackets", "tcp://[fe80::1]:29400"),
    ("::1", "etcd", "needs brackets", "etcd://[::1]:2379"),
    ("fe80::1%eth0", None, "needs brackets", "tcp://[fe80::1%25eth0]:29400"),
    ("a:1:2", None, "more than one colon", "tcp://node0:29400"),
    ("[::1", None, "expected a ']'", "tcp://[fd00::1]:29400"),
    ("[::1]29400", None, "nothing or ':PORT'", "tcp://node0:29400"),
    ("[10.0.0.1]:5", None, "an IPv6 address in the brackets", "tcp://[fd00::1]:29400"),
    ("[]:5", None, "an IPv6 address in the brackets", "tcp://[fd00::1]:29400"),
    ("[fe80::1%]:5", None, "an interface", "tcp://[fe80::1%25eth0]:29400"),
    ("tcp://[fe80::1%25]", None, "an interface", "tcp://[fe80::1%25eth0]:29400"),
    ("tcp://[fe80::1%25a!b]", None, "an interface", "tcp://[fe80::1%25eth0]:29400"),
    ("tpc://a", None, "did you mean tcp://?", "tcp://node0:29400"),
    ("flie:///x", None, "did you mean file://?", "file:///shared/jobs"),
    ("http://a:2379", "etcd", "did you mean etcd://?", "etcd://node0:2379"),
    ("https://a:2379", None, "did you mean etcds://?", "etcds://node0:2379"),
    ("c10d://a", None, "did you mean tcp://?", "tcp://node0:29400"),
    ("xyzzy://a", None, "known: etcd, etcds, file, memory, tcp)", "tcp://node0:29400"),
    ("://a", None, "no scheme before", "tcp://node0:29400"),
    ("1tcp://a", None, "no scheme before", "tcp://node0:29400"),
    ("file:/shared/x", None, "two slashes after 'file:'", "file:///shared/jobs"),
    ("tcp:/a", "c10d", "two slashes after 'tcp:'", "tcp://node0:29400"),
    ("file://shared/x", None, "three slashes", "file:///shared/jobs"),
    ("file://", None, "three slashes", "file:///shared/jobs"),
    ("shared/x", "file", "an absolute path", "file:///shared/jobs"),
    ("/shared/x y", None, "only backend file takes a path", "file:///shared/x%20y"),
    ("/shared/x", "etcd", "only backend file takes a path", "file:///shared/x"),
    ("file:///a%00b", None, "control character in the path", "file:///shared/jobs"),
    ("file:///a%zz", None, "two hex digits", "file:///shared/jobs"),
    ("file:///a b", None, "%20", "file:///shared/jobs"),
    ("file:///a#b", None, "%23", "file:///shared/jobs"),
    ("memory://", None, "expected a name", "memory://name"),
    ("tcp://a/b", None, "tcp:// has no path", "tcp://node0:29400"),
    ("etcd://a/b", None, "etcd:// has no path", "etcd://node0:2379"),
    ("tcp://u@a", None, "tcp:// has no users", "tcp://node0:29400"),
    ("etcd://@a", None, "user name before the @ is empty", "etcd://user:password@node0:2379"),
    ("etcd://u:@a", None, "password before the @ is empty", "etcd://user:password@node0:2379"),
    ("tcp://a,b", "static", "one host for backend static, found 2", "tcp://node0:29400"),
    ("tcp://a?x", None, "NAME=VALUE", "tcp://node0:29400?name=value"),
    ("tcp://a?x=", None, "NAME=VALUE", "tcp://node0:29400?name=value"),
    ("tcp://a?=x", None, "NAME=VALUE", "tcp://node0:29400?name=value"),
    ("tcp://a?x=1&", None, "NAME=VALUE", "tcp://node0:29400?name=value"),
    ("tcp://a?x=1&x=2", None, "'x' is given twice", "tcp://node0:29400?name=value"),
    ("etcd://a?ca=/x", None, "etcds:// only", "etcds://node0:2379?ca=/etc/ca.pem"),
    ("tcp://a", "etcd", "tcp:// is for backend tcpstore or static", "etcd://node0:2379"),
    ("etcd://a", "c10d", "and the backend is tcpstore", "tcp://node0:29400"),
    ("etcds://a", "file", "etcds:// is for backend etcd", "file:///shared/jobs"),
    ("file:///x", "memory", "and the backend is memory", "memory://name"),
]


@pytest.mark.parametrize(("text", "backend", "problem", "example"), BAD)
def test_every_mistake_is_told_with_an_example(
    text: str, backend: str | None, problem: str, example: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text, backend=backend)
    error = caught.value
    assert (error.field, error.value) == ("--rdzv-endpoint", text)
    assert problem in error.problem
    assert error.hint == f"for example {example}"
    # The example works, with the requested backend unless that was the mistake.
    parse_endpoint(example)


@pytest.mark.parametrize(
    "text",
    [
        "etcd://u:s3cret@x@a",
        "etcd://u:s3cr@et@a:1",
        "etcd://u:s3cret@a:port",
        "etcd://u:s3cret/x@a",
        "etcd://u:12?s3cret@a",
        "etcd://u:#s3cret@a",
        "etcd://u:%s3cret@a",
        "etcd://u:s3cret x@a",
        "etcd://u/v:s3cret@a",
        "etcd://u:s3cret\n@a",
        "etdc://u:s3cret@a",
        "tcp://u:s3cret@a",
        "u:s3cret@a",
        "u:s3cret@",
        "file://u:s3cret@a",
        "://u:s3cret@a",
    ],
)
def test_no_error_shows_a_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)
    said = repr(caught.value) + str(caught.value) + repr(caught.value.__cause__)
    assert "s3cr" not in said and "***@" in str(caught.value.value)


def test_two_at_signs_are_told_how_to_be_written() -> None:
    with pytest.raises(ConfigError, match=r"more than one @.*%40"):
        parse_endpoint("etcd://u:p@ss@a")


def test_the_password_is_in_neither_text_of_an_endpoint() -> None:
    endpoint = parse_endpoint("etcds://me:s3cret@a,b:1?ca=/c")
    assert endpoint.password == "s3cret"
    assert "s3cret" not in repr(endpoint) + str(endpoint)
    assert str(endpoint) == "etcds://me@a:2379,b:1?ca=/c"


def test_an_endpoint_is_a_value() -> None:
    one = parse_endpoint("etcds://me:s3cret@a?ca=/c")
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, parse_endpoint(" etcds://me:s3cret@a:2379?ca=/c")}) == 1
    assert one.tls and not parse_endpoint("etcd://a").tls


def test_a_backend_that_is_not_built_in_is_told_by_its_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"known: etcd, file.*did you mean etcd") as caught:
        parse_endpoint("a", backend="ectd")
    assert caught.value.field == "--rdzv-backend"


def test_the_error_names_the_variable_the_endpoint_came_from() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint("", flag="PET_RDZV_ENDPOINT")
    assert caught.value.field == "PET_RDZV_ENDPOINT"


_names = st.from_regex(r"[a-z]([a-z0-9_-]{0,8}[a-z0-9])?(\.[a-z0-9]{1,5}){0,2}", fullmatch=True)
_zones = st.sampled_from(["", "", "%eth0", "%25", "%251", "%1"])
_v6 = st.builds(lambda address, zone: f"{address}{zone}", st.ip_addresses(v=6), _zones)
_hosts = st.builds(HostPort, _names | st.ip_addresses(v=4).map(str) | _v6, st.integers(1, 65535))
_host_lists = st.lists(_hosts, min_size=1, max_size=4).map(tuple)
# Whatever can be written: no control characters; file names may contain stray bytes.
_texts = st.text(
    st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("%&=?#@:/+ [],"), min_size=1
)
_options = st.dictionaries(
    _texts.filter(lambda key: key not in ("ca", "cert", "key")), _texts, max_size=3
)
_endpoints = st.one_of(
    st.builds(
        Endpoint,
        scheme=st.just("tcp"),
        backend=st.just("tcpstore"),
        hosts=_host_lists,
        options=_options,
    ),
    st.builds(
        Endpoint,
        scheme=st.sampled_from(["etcd", "etcds"]),
        backend=st.just("etcd"),
        hosts=_host_lists,
        user=st.none() | _texts,
        options=_options,
    ),
    st.builds(
        Endpoint,
        scheme=st.just("file"),
        backend=st.just("file"),
        path=_texts.map(lambda path: f"/{path}"),
        options=_options,
    ),
    st.builds(
        Endpoint,
        scheme=st.just("memory"),
        backend=st.just("memory"),
        path=_texts,
        options=_options,
    ),
)


@settings(max_examples=400)
@given(_endpoints)
def test_an_endpoint_is_what_its_url_says(endpoint: Endpoint) -> None:
    assert parse_endpoint(str(endpoint)) == endpoint
    assert parse_endpoint(str(endpoint), backend=endpoint.backend, default_port=1) == endpoint


@settings(max_examples=200)
@given(_texts, _texts)
def test_any_password_can_be_written(user: str, password: str) -> None:
    endpoint = parse_endpoint(f"etcd://{quote(user, safe='')}:{quote(password, safe='')}@a")
    assert (endpoint.user, endpoint.password) == (user, password)


_starts = ["", "tcp://", "etcd://", "etcds://", "file://", "file:///", "memory://", "[", "a:"]


@settings(max_examples=400)
@given(
    st.sampled_from(_starts),
    st.text(st.characters() | st.sampled_from("%&=?#@:/[],0123456789ab ")),
    st.sampled_from([None, "tcpstore", "static", "etcd", "file", "memory"]),
)
def test_any_text_is_understood_or_refused_as_a_setting(
    start: str, text: str, backend: str | None
) -> None:
    endpoint = None
    with contextlib.suppress(ConfigError):
        endpoint = parse_endpoint(start + text, backend=backend)
    if endpoint is not None and endpoint.password is None:
        assert parse_endpoint(str(endpoint), backend=endpoint.backend) == endpoint
