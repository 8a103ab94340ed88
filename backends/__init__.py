"""The backends. Each module is imported when its backend is first used; read ``base`` first."""

if __name__ != "unidist.backends":
    # Under a second name, every class of this package would exist twice.
    raise ImportError("import unidist.backends, not backends: this directory is a package of unidist.")
