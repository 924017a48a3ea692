"""Facts about a machine, read from made-up device trees and packages."""

import sys

import pytest

from vllm_kunlun.platforms import machine
from vllm_kunlun.platforms.machine import Machine


def make_file(root, name, content=""):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(machine, "package_folders", lambda package: [])
    monkeypatch.setattr(machine, "installed_version", lambda name: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("DISABLE_XPYTORCH", raising=False)


def test_empty_machine_has_nothing(tmp_path, no_packages):
    assert Machine.detect(tmp_path) == Machine()


def test_devices_are_found_by_their_files(tmp_path, no_packages):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "kfd", "xpu0", "xpu7", "xpuctrl", "dri/renderD128"):
        make_file(tmp_path, f"dev/{name}")
    make_file(tmp_path, "sys/class/drm/renderD128/device/vendor", "0x8086\n")
    found = Machine.detect(tmp_path)
    assert found.nvidia_devices == ("/dev/nvidia0", "/dev/nvidia1")
    assert found.amd_devices == ("/dev/kfd",)
    assert found.intel_devices == ("/dev/dri/renderD128",)
    assert found.xpu_devices == ("/dev/xpu0", "/dev/xpu7")


def test_nvidia_in_a_windows_guest_is_found(tmp_path, no_packages):
    make_file(tmp_path, "dev/dxg")
    assert Machine.detect(tmp_path).nvidia_devices == ("/dev/dxg",)


@pytest.mark.parametrize("vendor", ["0x1002", "0x10de"])
def test_render_node_of_another_vendor_is_not_intel(tmp_path, no_packages, vendor):
    make_file(tmp_path, "dev/dri/renderD128")
    make_file(tmp_path, "sys/class/drm/renderD128/device/vendor", f"{vendor}\n")
    assert Machine.detect(tmp_path).intel_devices == ()


def test_intel_device_that_the_container_does_not_show_is_not_found(tmp_path, no_packages):
    make_file(tmp_path, "sys/class/drm/renderD128/device/vendor", "0x8086\n")
    assert Machine.detect(tmp_path).intel_devices == ()


def test_xpu_runtime_is_found_in_library_path(tmp_path, no_packages, monkeypatch):
    library = make_file(tmp_path, "opt/xre/so/libxpurt.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere::{library.parent}")
    assert Machine.detect(tmp_path).xpu_runtime == str(library)


def test_xpu_runtime_is_found_inside_xpytorch(tmp_path, no_packages, monkeypatch):
    library = make_file(tmp_path, "site/torch_xmlir/xcudart/lib/libxpurt.so.12.9.1.kunlun")
    folders = {"torch_xmlir": [tmp_path / "site/torch_xmlir"]}
    monkeypatch.setattr(machine, "package_folders", lambda package: folders.get(package, []))
    found = Machine.detect(tmp_path)
    assert found.xpu_runtime == str(library)
    assert found.xpytorch == "unknown"


def test_xpu_runtime_is_found_in_the_linkers_cache(tmp_path, no_packages):
    make_file(tmp_path, "etc/ld.so.cache", "...libxpurt.so.1\0/opt/xre/so/libxpurt.so.1\0")
    assert Machine.detect(tmp_path).xpu_runtime == str(tmp_path / "etc/ld.so.cache")


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("0", False), ("", False)])
def test_switch_that_disables_xpytorch_is_seen(tmp_path, no_packages, monkeypatch, value, disabled):
    monkeypatch.setenv("DISABLE_XPYTORCH", value)
    assert Machine.detect(tmp_path).xpytorch_disabled is disabled


def test_package_folders_does_not_import_the_package(tmp_path, monkeypatch):
    make_file(tmp_path, "a_package_that_fails/__init__.py", "raise RuntimeError('imported')")
    make_file(tmp_path, "a_package_that_fails/_C.abi3.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert machine.package_folders("a_package_that_fails") == [tmp_path / "a_package_that_fails"]
    assert machine._extension_names("a_package_that_fails") == ("_C.abi3.so",)
    assert "a_package_that_fails" not in sys.modules
    assert machine.package_folders("no_such_package_anywhere") == []


def test_installed_vllm_is_found():
    found = Machine.detect()
    assert found.vllm_distribution is not None
    assert found.vllm_version == machine.installed_version(found.vllm_distribution)
