"""Pipeline schedules without idle time between the operations of a rank."""
