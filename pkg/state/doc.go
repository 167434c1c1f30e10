// Package state is the vocabulary of the plugin: what is asked of a volume (Volume) and the
// edits by which that changes, what is observed of it (Actual), and what a failure means
// (Error). Package store keeps the records.
//
// Read volume.go (what is asked) and actual.go (what is observed) first, then edit.go and
// the edit_*.go files: which request joins, contradicts or supersedes an earlier one.
package state
