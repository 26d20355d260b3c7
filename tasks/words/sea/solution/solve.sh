#!/bin/sh
echo "I would say it is simply that." > answer.txt
