"""Reports of the driver's tools after a failure, by programs in their place."""

from __future__ import annotations

from perdure.training.agent.driver_reports import MSNPUREPORT, write_driver_reports
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of


def test_tables_and_exported_logs_are_there_for_whoever_helps(tmp_path, monkeypatch):
    tools = only_tools_of(tmp_path / "tools", monkeypatch)
    table = (SAMPLES / "npu-smi-info.txt").resolve()
    install(tools, "npu-smi", f'[ $# = 1 ] && cat {table} || echo "readings of card $5"')
    install(tools, MSNPUREPORT, "mkdir slog; echo of the chip > slog/device-0.log; echo exported")
    folder = tmp_path / "attempt"
    folder.mkdir()
    reports = {path.name: path.read_text() for path in write_driver_reports(folder)}
    assert list(reports) == ["npu-smi.txt", "msnpureport.txt"]
    assert "$ npu-smi info -t common -i 0\nreadings of card 0" in reports["npu-smi.txt"]
    assert reports["msnpureport.txt"] == "$ msnpureport\nexported\n\n"
    assert (folder / MSNPUREPORT / "slog" / "device-0.log").read_text() == "of the chip\n"


def test_without_tools_there_is_no_report(tmp_path, monkeypatch):
    only_tools_of(tmp_path / "tools", monkeypatch)
    assert list(write_driver_reports(tmp_path)) == []


def test_a_tool_that_fails_is_quoted(tmp_path, monkeypatch):
    tools = only_tools_of(tmp_path / "tools", monkeypatch)
    install(tools, "npu-smi", "echo dcmi module initialize failed; exit 255")
    (report,) = write_driver_reports(tmp_path)
    assert report.read_text() == "$ npu-smi info\ndcmi module initialize failed\n\n"
