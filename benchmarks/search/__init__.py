"""`fit`, the search for the best model within a device's budget. Imports predict, measure and devices."""
