package main

type carriedEpisode struct{}
