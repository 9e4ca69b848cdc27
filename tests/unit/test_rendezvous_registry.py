"""Backends by name, including plug-ins: real distributions in a folder, imported only when asked for."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import ConfigError, RendezvousError
from rallypoint.rendezvous import (
    Backend,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    Scheme,
    parse_endpoint,
    rendezvous_handler_registry,
)
from rallypoint.rendezvous.backends.memory import MEMORY
from rallypoint.rendezvous.catalogue import BACKENDS, BUILT_IN, Catalogue, catalogue
from rallypoint.rendezvous.registry import CREATORS


OURS = ("etcd", "file", "memory", "static", "tcpstore")


class Handler:
    def __init__(self, backend: str, params: Any = None) -> None:
        self.backend = backend
        self.params = params

    def get_backend(self) -> str:
        return self.backend


def creator(name: str) -> Callable[[Any], Any]:
    return lambda params: Handler(name, params)


def parameters(backend: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "node0", "job", 1, 1)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a distribution with entry points and a module into a folder on ``sys.path``."""
    modules: list[str] = []

    def install(name: str, points: dict[str, str], source: str = "", group: str = CREATORS) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = [f"{key} = {value}" for key, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        modules.append(f"{name}_module")
        (tmp_path / f"{name}_module.py").write_text(source)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for module in modules:
        sys.modules.pop(module, None)


HANDLER_SOURCE = """
class Handler:
    def get_backend(self):
        return "zoo"

def create(params):
    handler = Handler()
    handler.params = params
    return handler
"""


def with_plug_ins() -> RendezvousHandlerRegistry:
    return RendezvousHandlerRegistry(catalogue, group=CREATORS)


def test_a_registered_creator_is_given_the_parameters() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", creator("mine"))
    params = parameters("mine")
    assert registry.create_handler(params).params is params
    assert registry.known() == ("mine",)


def test_the_same_creator_may_come_twice_and_another_one_may_not() -> None:
    registry = RendezvousHandlerRegistry()
    first, second = creator("mine"), creator("mine")
    registry.register("mine", first)
    registry.register("mine", first)
    with pytest.raises(ConfigError, match=r"'mine': registered already, with .*creator"):
        registry.register("mine", second)
    with pytest.raises(ConfigError, match="expected a name"):
        registry.register("", first)


def test_a_method_is_the_same_creator_each_time_it_is_looked_up() -> None:
    class Factory:
        def create(self, params: Any) -> Any:
            return Handler("mine", params)

    factory, registry = Factory(), RendezvousHandlerRegistry()
    registry.register("mine", factory.create)
    registry.register("mine", factory.create)
    with pytest.raises(ConfigError):
        registry.register("mine", Factory().create)


def test_a_handler_of_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", creator("yours"))
    with pytest.raises(RendezvousError, match=r"'mine'.*'yours'"):
        registry.create_handler(parameters("mine"))


def test_what_is_no_handler_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RendezvousError, match=r"'mine' returned NoneType"):
        registry.create_handler(parameters("mine"))


def test_an_error_of_the_creator_is_not_dressed_up() -> None:
    def create(params: Any) -> Any:
        raise ConfigError("--rdzv-endpoint", params.endpoint, "no")

    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    with pytest.raises(ConfigError, match="--rdzv-endpoint 'node0'"):
        registry.create_handler(parameters("mine"))


def test_an_unknown_backend_is_told_which_there_are_and_which_was_meant(
    install: Callable[..., None],
) -> None:
    install("zoo", {"zoo": "zoo_module:create"})
    registry = with_plug_ins()
    registry.register("mine", creator("mine"))
    with pytest.raises(ConfigError) as caught:
        registry.create_handler(parameters("ectd"))
    text = str(caught.value)
    assert "--rdzv-backend 'ectd'" in text
    assert "etcd (also etcd-v2), file, memory, mine, static, tcpstore (also c10d, tcp), zoo" in text
    assert "did you mean etcd?" in text
    assert "zoo_module" not in sys.modules
    with pytest.raises(ConfigError, match="known: none"):
        RendezvousHandlerRegistry().create_handler(parameters("etcd"))


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("tcpstore", "tcpstore"),
        ("c10d", "tcpstore"),
        ("tcp", "tcpstore"),
        ("etcd", "etcd"),
        ("etcd-v2", "etcd"),
    ],
)
def test_built_in_backends_go_by_other_names_too(asked: str, made: str) -> None:
    pytest.importorskip("etcd3gw")
    assert with_plug_ins().create_handler(parameters(asked)).get_backend() == made


@pytest.mark.parametrize("name", ["tcpstore", "c10d"])
def test_a_built_in_name_is_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="tcpstore is a built-in"):
        with_plug_ins().register(name, creator("tcpstore"))


def test_a_plug_in_is_listed_without_being_imported_and_imported_when_asked_for(
    install: Callable[..., None],
) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    install("broken", {"broken": "broken_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    assert registry.known() == tuple(sorted([*OURS, "broken", "zoo"]))
    assert "zoo_module" not in sys.modules
    params = parameters("zoo")
    handler = registry.create_handler(params)
    assert handler.params is params and handler.get_backend() == "zoo"


def test_plug_ins_of_other_groups_and_of_a_registry_without_any_are_not_seen(
    install: Callable[..., None],
) -> None:
    install("other", {"other": "other_module:create"}, group="torchrun.handlers")
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    assert with_plug_ins().known() == (*OURS, "zoo")
    assert RendezvousHandlerRegistry(catalogue).known() == OURS


@pytest.mark.parametrize(
    ("target", "source", "told"),
    [
        ("zoo_module:create", "import no_such_thing", "No module named 'no_such_thing'"),
        ("no_such_module:create", "", "No module named 'no_such_module'"),
        ("zoo_module:create", "", "create"),
        ("zoo_module:create", "1 / 0", "ZeroDivisionError"),
        ("zoo_module:create", "def create(:", "SyntaxError"),
    ],
)
def test_a_broken_plug_in_is_named_with_its_distribution_and_its_error(
    install: Callable[..., None], target: str, source: str, told: str
) -> None:
    install("zoo", {"zoo": target}, source)
    with pytest.raises(RendezvousError) as caught:
        with_plug_ins().create_handler(parameters("zoo"))
    text = str(caught.value)
    assert f"entry point zoo = {target} of distribution zoo 1.2" in text and told in text
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in text


def test_a_plug_in_that_is_no_function_is_refused(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, "create = 5")
    with pytest.raises(RendezvousError, match=r"distribution zoo 1.2 is int, not a function"):
        with_plug_ins().create_handler(parameters("zoo"))


def test_a_plug_in_whose_handler_has_another_name_is_refused(
    install: Callable[..., None],
) -> None:
    install("zoo", {"keeper": "zoo_module:create"}, HANDLER_SOURCE)
    with pytest.raises(RendezvousError, match=r"'keeper'.*'zoo'"):
        with_plug_ins().create_handler(parameters("keeper"))


def test_two_plug_ins_with_one_name_are_not_chosen_between(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    install("ark", {"zoo": "ark_module:create"}, HANDLER_SOURCE)
    with pytest.raises(ConfigError, match=r"several plug-ins") as caught:
        with_plug_ins().create_handler(parameters("zoo"))
    assert "distribution zoo 1.2" in str(caught.value)
    assert "distribution ark 1.2" in str(caught.value)


@pytest.mark.parametrize("name", ["etcd", "c10d"])
def test_a_plug_in_cannot_take_a_built_in_name(
    install: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    install("zoo", {name: "zoo_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    assert registry.create_handler(parameters(name)).get_backend() in ("etcd", "tcpstore")
    with caplog.at_level(logging.WARNING):
        assert registry.known() == OURS
    assert "distribution zoo 1.2 is ignored" in caplog.text


def test_a_registered_creator_goes_before_a_plug_in(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    registry.register("zoo", creator("zoo"))
    assert isinstance(registry.create_handler(parameters("zoo")), Handler)
    assert registry.known() == (*OURS, "zoo")


def test_the_shared_registry_knows_the_built_in_backends() -> None:
    assert set(OURS) <= set(rendezvous_handler_registry.known())
    names = [name for each in catalogue.built_in() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
    for each in catalogue.built_in():
        for scheme in each.schemes:
            assert parse_endpoint(scheme.example, backend=each.name).scheme == scheme.name


# -- descriptors ----------------------------------------------------------------------------------

DESCRIPTOR_SOURCE = """
from rallypoint.rendezvous import Backend, Scheme

ZOO = Backend(
    name="zoo",
    help="a zoo",
    aliases=("ark",),
    schemes=(Scheme(name="zoo", example="zoo://node0:7", default_port=7),),
    home=lambda meeting: None,
)
"""


def own(**fields: Any) -> Backend:
    scheme = Scheme(name="mine", example="mine://node0:7", default_port=7)
    given: dict[str, Any] = {"name": "mine", "help": "", "schemes": (scheme,), "home": MEMORY.home}
    return Backend(**{**given, **fields})


def test_a_plug_in_is_imported_when_its_scheme_or_name_is_asked_for(
    install: Callable[..., None],
) -> None:
    install("zoo", {"zoo": "zoo_module:ZOO"}, DESCRIPTOR_SOURCE, group=BACKENDS)
    there = Catalogue(BUILT_IN, group=BACKENDS)
    assert there.parse("tcp://a", None, None, "--at").backend == "tcpstore"
    assert there.names() == (*OURS, "zoo")
    assert "zoo_module" not in sys.modules
    assert str(there.parse("zoo://a", None, None, "--at")) == "zoo://a:7"
    assert there.find("zoo") is there.find("ark")
    with pytest.raises(ConfigError, match=r"memory, tcp, zoo\); did you mean zoo://\?"):
        there.parse("zooo://a", None, None, "--at")


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("zoo", "import no_such_thing", "No module named 'no_such_thing'"),
        ("zoo", "ZOO = 5", "is int, not a Backend"),
        ("zebra", DESCRIPTOR_SOURCE, "calls itself 'zoo'"),
        ("zoo", DESCRIPTOR_SOURCE.replace("default_port=7", ""), "Scheme.default_port"),
    ],
)
def test_a_broken_descriptor_is_named_if_asked_for_and_else_only_logged(
    install: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    name: str,
    source: str,
    told: str,
) -> None:
    install("zoo", {name: "zoo_module:ZOO"}, source, group=BACKENDS)
    there = Catalogue(BUILT_IN, group=BACKENDS)
    with pytest.raises(RendezvousError, match="distribution zoo 1.2") as caught:
        there.find(name)
    assert told in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert [each.name for each in there.backends()] == [each.name for each in there.built_in()]
    assert told in caplog.text


def test_a_registered_backend_is_found_and_its_names_are_taken() -> None:
    there, mine = Catalogue(BUILT_IN), own(aliases=("my",))
    there.register(mine)
    there.register(mine)
    assert there.find("my") is mine
    assert there.parse("mine://a", None, None, "--at").backend == "mine"
    for taken in (own(), own(name="etcd"), own(name="other", aliases=("c10d",))):
        with pytest.raises(ConfigError, match="has this name already"):
            there.register(taken)


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"name": ""}, "Backend.name"), ({"schemes": ()}, "Backend.schemes")],
)
def test_a_descriptor_that_cannot_work_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        own(**fields)
    with pytest.raises(ConfigError, match=r"Scheme\.name 'Mine'"):
        Scheme(name="Mine", example="", takes="name")


def test_importing_the_package_looks_for_no_plug_ins() -> None:
    program = (
        "import sys; import rallypoint.rendezvous as r;"
        "assert 'importlib.metadata' not in sys.modules, 'entry points';"
        "assert 'torch' not in sys.modules, 'torch';"
        "assert 'rallypoint.rendezvous.create' not in sys.modules, 'homes';"
        "assert 'rallypoint.rendezvous.backends' not in sys.modules, 'backends';"
        "assert r.rendezvous_handler_registry is not None"
    )
    subprocess.run([sys.executable, "-S", "-c", _path() + program], check=True, timeout=240)


def _path() -> str:
    # -S: other packages' .pth files, run by site, import what they like.
    folder = Path(importlib.import_module("rallypoint").__file__ or "").parents[1]
    return f"import sys; sys.path.insert(0, {str(folder)!r});"
