"""What several tests share: engines, the exactness comparison, small fakes."""
