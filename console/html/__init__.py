"""HTML pages and charts by Jinja2: base template, style sheet and macros that all pages share."""
