"""The report of finished stages: HTML, Markdown and CSV, and the charts and tables that other pages use too."""
