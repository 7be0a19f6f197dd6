"""A debugger and diagnostics toolkit for PyTorch DistributedDataParallel jobs.

    import ddpdoctor

    run = ddpdoctor.read_run("path/to/run")
    for finding in ddpdoctor.examine(run):
        print(finding.code, finding.message)

These names are the public API (docs/api.md). Each is imported when it is first used, since every
rank of a job imports this package.
"""

__version__ = "0.1.0"

__all__ = [
    "DoctorError",
    "Finding",
    "Location",
    "Rule",
    "Run",
    "Severity",
    "__version__",
    "examine",
    "read_run",
    "rule",
]

TYPE_CHECKING = False  # As type checkers know it, without importing typing.
if TYPE_CHECKING:
    from ddpdoctor.api import examine, read_run
    from ddpdoctor.core.errors import DoctorError
    from ddpdoctor.core.finding import Finding, Rule, Severity, rule
    from ddpdoctor.core.user_code import Location
    from ddpdoctor.run.snapshot import Run

_MODULES = {
    "DoctorError": "ddpdoctor.core.errors",
    "Finding": "ddpdoctor.core.finding",
    "Location": "ddpdoctor.core.user_code",
    "Rule": "ddpdoctor.core.finding",
    "Run": "ddpdoctor.run.snapshot",
    "Severity": "ddpdoctor.core.finding",
    "examine": "ddpdoctor.api",
    "load_ipython_extension": "ddpdoctor.notebook",  # IPython looks for it
    "read_run": "ddpdoctor.api",
    "rule": "ddpdoctor.core.finding",
}

if not TYPE_CHECKING:  # Otherwise a type checker would accept any name as one of ours.

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
