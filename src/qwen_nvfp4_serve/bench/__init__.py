"""Measure a running server: prefill and decode at context depth, as data that tables and charts are made from."""
