"""The codemod: Horovod's calls become the drop-in's, or unidist's own."""
