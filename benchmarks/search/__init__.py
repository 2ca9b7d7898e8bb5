"""`fit`, the search for the best model within a device's budget. Imports reporting, predict, measure and devices."""
