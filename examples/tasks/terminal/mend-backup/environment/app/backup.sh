#!/bin/bash
set -e
cp /app/notes/*.text /app/saved/
ls /app/saved | wc -l > /app/saved/count
