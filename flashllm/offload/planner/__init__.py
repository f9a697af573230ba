"""The policy search: cost model, linear program, schedules."""
