"""The engines. Each module is imported when its engine is first asked for; read ``base`` first."""

if __name__ != "unidist.backends":
    # A second name would make every class of this package twice.
    raise ImportError("import unidist.backends, not backends: this folder is unidist's own package.")
