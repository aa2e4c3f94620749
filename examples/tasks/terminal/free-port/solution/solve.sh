#!/bin/bash
sed -i 's/^cache 8001$/cache 8002/' /app/services.conf
