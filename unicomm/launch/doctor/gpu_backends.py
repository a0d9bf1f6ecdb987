"""Checks of the GPU backends: library, functions, GPUs, self-test. No check raises."""

from __future__ import annotations

from . import verified
from .findings import BROKEN, NOT_HERE, WORKS, BackendReport, Finding, attempt, line_of


def gpu_reports() -> list[BackendReport]:
    return [_vendor("nccl"), _vendor("rccl"), _shmem("nvshmem"), _shmem("rocshmem")]


def _vendor(name: str) -> BackendReport:
    """Checks NCCL or RCCL. A library can be opened without a GPU; the self-test needs one."""
    try:
        import torch

        from unicomm.backends.nccl import library
    except Exception as error:
        return BackendReport(name, BROKEN, [Finding("import", False, line_of(error), "reinstall unicomm")])
    vendor = library.NCCL if name == "nccl" else library.RCCL
    findings = [
        *_mock_runs(name),
        Finding(f"torch is built for {vendor.title}'s GPUs", None, "yes" if vendor.built() else "no"),
    ]
    try:
        opened = library.open_library(vendor)
    except Exception as error:
        findings.append(Finding(vendor.title, None, line_of(error), vendor.cure))
        return BackendReport(name, NOT_HERE, findings)
    lacking = [f for f, since, there in opened.native.functions() if not there and since]
    found = f"{library.version_text(opened.version)}, {opened.native.file}"
    findings.append(Finding(vendor.title, True, found))
    findings.append(Finding("missing functions", None, ", ".join(lacking) or "none"))
    return _on_gpus(name, findings, torch.cuda.device_count() if vendor.built() else 0)


def _shmem(name: str) -> BackendReport:
    """Checks NVSHMEM or rocSHMEM."""
    try:
        import torch

        from unicomm.backends.vendor import shmem_libraries as vendors
    except Exception as error:
        return BackendReport(name, BROKEN, [Finding("import", False, line_of(error), "reinstall unicomm")])
    vendor = vendors.NVSHMEM if name == "nvshmem" else vendors.ROCSHMEM
    findings = _mock_runs(name)
    if name == "rocshmem":
        findings.append(rocshmem_unit())
    try:
        vendors.open_table(vendor)
    except Exception as error:
        findings.append(Finding(vendor.title, None, line_of(error), vendor.cure))
        return BackendReport(name, NOT_HERE, findings)
    findings.append(Finding(vendor.title, True, vendor.version()))
    hip = torch.version.hip is not None
    return _on_gpus(name, findings, torch.cuda.device_count() if hip == (name == "rocshmem") else 0)


def rocshmem_unit() -> Finding:
    """Checks whether `unicomm build rocshmem` has built the unit over rocSHMEM, and with what."""
    from unicomm.extensions.build_rocshmem import built_unit

    what = "unit for rocSHMEM"
    unit = built_unit()
    if unit is None:
        return Finding(what, None, "not built", "with AMD GPUs and rocSHMEM: unicomm build rocshmem")
    return Finding(
        what, True, f"rocSHMEM {unit.rocshmem}, {unit.hipcc}, for {', '.join(unit.targets)}: {unit.path}"
    )


def _mock_runs(name: str) -> list[Finding]:
    return [
        Finding("tested without a GPU only", None, f"{'; '.join([row.what, *row.more])} ({row.when})")
        for row in verified.load().on_mocks
        if row.backend == name
    ]


def _on_gpus(name: str, findings: list[Finding], count: int) -> BackendReport:
    """Completes the report of a backend whose library was found, with a self-test if there is a GPU."""
    import torch

    if not count:
        findings.append(Finding("GPUs", None, "this torch sees none"))
        return BackendReport(name, NOT_HERE, findings)
    findings.append(Finding("GPUs", True, f"{count} x {torch.cuda.get_device_name(0)}"))
    findings.append(_self_test(name))
    return BackendReport(name, WORKS if findings[-1].ok else BROKEN, findings)


def _self_test(name: str) -> Finding:
    def run() -> str:
        import torch

        import unicomm

        with unicomm.new_comm(name, torch.device("cuda", 0), name="doctor", rank=0, size=1) as comm:
            x = torch.ones(1000, device="cuda:0")
            comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False).wait_blocking(20)
            if not bool((x == 1).all()):
                raise ArithmeticError("the sum is wrong")
        return ""

    return attempt("self-test: all_reduce on one rank", "report this", run)
