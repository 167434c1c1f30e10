// Package ui looks at the page of `csi-node ui` and `kubectl csi-node ui` in a real browser, without a screen: what it
// shows, live, on a phone, in the dark, and by the keyboard alone. Begin with TestPageShowsTheCluster. It needs Chromium,
// and root for the page of a real plugin; no cluster.
//
//	go test . -run "^TestPicture$" -update      draws docs/ui.png anew
//	go test . -run TestPictures -shots DIR      draws the page on all screens, for whoever wants to look at it
package ui
