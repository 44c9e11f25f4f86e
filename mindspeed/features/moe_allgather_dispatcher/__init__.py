"""All-gather dispatcher whose gathers are posted before the first wait."""
