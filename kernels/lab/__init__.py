"""The kernel lab: your own kernel as a value, `check` against float64 over ragged shapes, `bench` with cold weights."""
