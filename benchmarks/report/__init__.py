"""The report of finished stages: HTML, Markdown and CSV, and the charts, tables and pages that compare uses too."""
