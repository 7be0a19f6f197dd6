"""``python -m ddpdoctor``."""

from ddpdoctor.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
