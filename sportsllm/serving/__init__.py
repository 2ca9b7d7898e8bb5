"""An HTTP server for exports: sequences that share one model, OpenAI's endpoints, and a page."""
