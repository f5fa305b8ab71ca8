"""Settings: declared in `options`, read from YAML files by `files`; `cli/command` chooses among all sources."""
