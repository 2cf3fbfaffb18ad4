"""The catalogue of seeded faults, and the test that all of them are caught."""
