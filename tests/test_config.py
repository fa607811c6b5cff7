"""Sources of settings, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokentape._settings import env_name
from tokentape.config import SECRETS, read_keys, resolve, settings
from tokentape.errors import InvalidRequest
from tokentape.gateway._limits import Limits

KEY = "k" * 16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokentape.toml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_precedence_is_flag_environment_file_default(file: Path) -> None:
    file.write_text('port = 1\nhost = "127.0.0.2"\nmodel_id = "filed"\n', encoding="utf-8")
    environ = {"TOKENTAPE_PORT": "2", "TOKENTAPE_HOST": "127.0.0.3"}
    resolved = resolve({"port": 3}, environ, file)
    config = resolved.config
    assert (config.port, config.host, config.model_id, config.history) == (3, "127.0.0.3", "filed", "sampled")
    assert [resolved.sources[name] for name in ("port", "host", "model_id", "history")] == [
        "flag",
        "env",
        "file",
        "default",
    ]


def test_tables_of_the_file_are_inner_settings(file: Path) -> None:
    file.write_text(
        '[engine]\nkind = "vllm"\nurls = ["http://a:1", "http://b:1"]\n[engine.timeouts]\nconnect = 2\n'
        "[limits]\ncalls_per_key = 4\n"
        f'[keys]\nalice = "{KEY}"\n',
        encoding="utf-8",
    )
    config = resolve({}, {}, file).config
    assert (config.engine.urls, config.engine.timeouts.connect) == (("http://a:1", "http://b:1"), 2.0)
    assert config.limits == Limits(calls_per_key=4)
    assert config.all_keys().caller({"x-api-key": KEY}).owner == "alice"


def test_every_setting_can_be_set_in_the_environment() -> None:
    assert len({env_name(name) for name in settings()}) == len(settings())
    environ = {
        "TOKENTAPE_ENGINE_KIND": "sglang",
        "TOKENTAPE_ENGINE_URLS": "http://a:1, http://b:1",
        "TOKENTAPE_TRACING": "true",
        "TOKENTAPE_LIMITS_RETRY_GRACE": "0.5",
        "TOKENTAPE_KEYS": f"alice={KEY},bob={KEY}=2",
    }
    config = resolve({}, environ).config
    assert config.engine.urls == ("http://a:1", "http://b:1")
    assert (config.tracing, config.limits.retry_grace) == (True, 0.5)
    assert config.keys == {"alice": KEY, "bob": f"{KEY}=2"}


def test_file_in_the_working_directory_is_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port = 1\n", encoding="utf-8")
    assert resolve({}, {}).config.port == 8800
    monkeypatch.chdir(file.parent)
    assert resolve({}, {}).config.port == 1


def test_file_can_be_named_in_the_environment(file: Path) -> None:
    file.write_text("port = 1\n", encoding="utf-8")
    assert resolve({}, {"TOKENTAPE_CONFIG": str(file)}).config.port == 1


def test_paths_in_a_file_are_relative_to_it(file: Path) -> None:
    file.write_text('data = "record"\nmodel = "/models/m"\n', encoding="utf-8")
    config = resolve({}, {}, file).config
    assert (config.data, config.model) == (file.parent / "record", Path("/models/m"))


def test_unknown_names_are_reported_with_the_nearest_one(file: Path) -> None:
    file.write_text("prot = 1\nzzzz = 1\n[limits]\nbody_byte = 1\n", encoding="utf-8")
    with pytest.raises(InvalidRequest) as raised:
        resolve({}, {}, file)
    text = str(raised.value)
    assert "'prot' (did you mean 'port'?)" in text
    assert "'limits.body_byte' (did you mean 'limits.body_bytes'?)" in text
    assert "'zzzz'," in text


def test_table_with_a_single_value_is_shown_with_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "tokentape.toml"
    file.write_text('engine = "vllm"\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"'engine' \(it is a table; its settings: engine\.kind, engine\.urls, "):
        resolve({}, {}, file)


def test_path_may_come_as_a_path(tmp_path: Path) -> None:
    assert resolve({"data": tmp_path}, {}).config.data == tmp_path


def test_path_that_is_no_text_is_refused_in_the_files_words(tmp_path: Path) -> None:
    file = tmp_path / "tokentape.toml"
    file.write_text("data = 5\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="data: expected `str`, got `int`"):
        resolve({}, {}, file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('port = "1"', "port: expected `int`, got `str`"),
        ("port = 70000", "port: expected `int` <= 65535"),
        ("port = -1", "port: expected `int` >= 0"),
        ("drain_seconds = nan", "drain_seconds: expected `float` >= 0"),
        ("drain_seconds = inf", "drain_seconds: expected `float` <= "),
        ('history = "all"', "history: expected one of sampled, template"),
        ("[limits]\nbody_bytes = 1.5", "limits.body_bytes: expected `int`"),
        ("[engine.timeouts]\nconnect = 0", "timeout connect must be a positive, finite number"),
        ('[engine]\nkind = "vllm"', "add --engine-url"),
        ('[engine]\nurls = ["http://a"]', "add --engine vllm"),
        ("port =", "can't be read"),
    ],
)
def test_invalid_value_is_named(file: Path, text: str, reason: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest) as raised:
        resolve({}, {}, file)
    assert reason in str(raised.value)


def test_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        resolve({}, {}, file)


def test_keys_are_also_read_from_files(tmp_path: Path) -> None:
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text(f"# agents\n\nalice = {KEY}a\n", encoding="utf-8")
    admins.write_text(f"ops={KEY}o\n", encoding="utf-8")
    environ = {"TOKENTAPE_KEYS_FILE": str(keys), "TOKENTAPE_ADMIN_KEYS_FILE": str(admins)}
    ring = resolve({}, {**environ, "TOKENTAPE_KEYS": f"bob={KEY}b"}).config.all_keys()
    callers = [ring.caller({"x-api-key": KEY + end}) for end in "abo"]
    assert [(caller.owner, caller.admin) for caller in callers] == [("alice", False), ("bob", False), ("ops", True)]
    twice = resolve({}, {**environ, "TOKENTAPE_KEYS": f"alice={KEY}b"}).config
    with pytest.raises(InvalidRequest, match="also set elsewhere: alice"):
        twice.all_keys()


def test_line_without_a_key_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="entry 1 has no '='") as raised:
        read_keys(path)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("text", ["", "# alice\n\n"])
def test_keys_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match="has no keys; expected lines name=key"):
        resolve({"keys_file": path}, {}).config.all_keys()


def test_secrets_are_not_shown() -> None:
    environ = {env_name(name): f"alice={KEY}" for name in SECRETS}
    resolved = resolve({}, environ)
    shown = str({name: resolved.shown(name) for name in settings()})
    assert KEY not in shown
    assert shown.count("***") == len(SECRETS)


def test_database_is_shown_without_its_password() -> None:
    resolved = resolve({"store": "postgresql://me:secret@host/runs"}, {})
    assert resolved.shown("store") == "postgresql://me:***@host/runs"
    assert resolved.config.location == "postgresql://me:secret@host/runs"
    assert resolve({}, {}).config.location == Path("runs/serve")
    with pytest.raises(InvalidRequest, match="for a directory, use data"):
        resolve({"store": "runs/serve"}, {})


def test_an_address_for_payloads_needs_payloads() -> None:
    with pytest.raises(InvalidRequest, match="add --payloads or --supports"):
        resolve({"payloads_to": "s3://bucket/run"}, {})
    assert resolve({"payloads_to": "s3://bucket/run", "supports": 5}, {}).config.payloads_to == "s3://bucket/run"


def test_weights_are_not_loaded_once_per_worker() -> None:
    with pytest.raises(InvalidRequest, match="one worker"):
        resolve({"workers": 2}, {})
    served = {"workers": 2, "engine.kind": "vllm", "engine.urls": ["http://a:1"]}
    assert resolve(served, {}).config.workers == 2
    with pytest.raises(InvalidRequest):
        resolve({"workers": 0}, {})
