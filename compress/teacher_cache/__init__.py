"""A teacher's distributions, stored on disk once and read back as a loss. Imports no other room of this package."""
