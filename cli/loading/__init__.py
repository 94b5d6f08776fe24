"""Load on a server: arrivals, clients, figures, soak. The work behind `specdec bench --url`."""
