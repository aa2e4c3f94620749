from pathlib import Path


def test_the_configuration():
    assert Path("/app/services.conf").read_text() == "web 8000\ndb 8001\nmail 8003\ncache 8002\n"
