package vm

// Promises is what a plugin had promised of one volume when the power went.
type Promises struct {
	CreateBegun, Created bool
	Staged               bool // at least once, so that it has a file system
	DeleteBegun, Deleted bool
	Files                []string // written, with an fsync that returned
	Bytes                int64    // its size at least
}

// PromisesOf reads the promises of a volume out of notes.
func PromisesOf(notes []Note, volume string) Promises {
	var p Promises
	for _, n := range notes {
		if n.Volume != volume {
			continue
		}
		switch n.Do {
		case "create":
			p.CreateBegun = true
			p.Created = p.Created || n.Done
		case "delete":
			p.DeleteBegun = true
			p.Deleted = p.Deleted || n.Done
		}
		if !n.Done {
			continue
		}
		switch n.Do {
		case "create", "grow":
			p.Bytes = n.Bytes
		case "stage":
			p.Staged = true
		case "write":
			p.Files = append(p.Files, n.File)
		}
	}
	return p
}
