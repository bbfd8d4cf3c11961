"""What the build of these pages does beyond MkDocs and mkdocstrings."""

import logging
import pathlib
import re

import griffe

log = logging.getLogger("mkdocs.hooks")


def on_page_content(html, page, config, files):
    """Warns of each name in `keras_gpufeed.__all__` that api.md lacks, or that has no docstring."""
    if page.file.src_uri != "api.md":
        return
    package = griffe.load("keras_gpufeed", search_paths=[pathlib.Path(config.config_file_path).parent])
    for name in map(str, package.exports or ()):
        if name.startswith("__"):
            continue
        if not re.search(rf'id="keras_gpufeed(\.\w+)*\.{name}"', html):
            log.warning("api.md does not show keras_gpufeed.%s.", name)
        if not package[name].has_docstring:
            log.warning("keras_gpufeed.%s has no docstring.", name)


class ExampleSections(griffe.Extension):
    """Shows `Example:` in a docstring as code, as mkdocstrings does for `Examples:` alone."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
