"""The kernel lab: describe a kernel, `check` it against float64 over odd shapes, `bench` it with cold caches."""
