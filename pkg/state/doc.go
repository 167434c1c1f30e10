// Package state holds what the rest of the plugin talks about: what is wanted of
// a volume (Volume) and the edits by which that changes, what is seen of it
// (Actual), and what a failure means (Error). Package store keeps the wanted.
//
// Read volume.go (what is asked) and actual.go (what is) first, then edit.go, the rules
// of what may be asked in addition to what is asked already.
package state
